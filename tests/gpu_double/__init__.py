"""A test double of a GPU, over memory of the host: everything from CuPy down. For tests only; no setting selects it.

What uses CuPy is real: `CupyDevice`, the plane, the runtime. Each rank has a `GpuDouble` of its own.

    gpu.py          `GpuDouble`: one process's CUDA with CuPy on it, and the real `CupyDevice` on that
    cuda.py         CUDA's runtime and driver: devices, contexts, streams, events, memory, captures
    kernels.py      CUDA's compiler: a kernel is known by its source, and done with NumPy
    nccl.py         NCCL: communicators of ranks that are threads
    cupy.py         the module `cupy`, of which these are parts, and its arrays
    torch_cuda.py   torch: CPU tensors that pass for a GPU's, and `torch.cuda`
    worlds.py       worlds of threads whose ranks have doubles

What it keeps of the real thing is the order of things, and who must do what:

- Every stream is a thread that works late, after a random moment, so whoever forgets to wait for an event reads old values.
  Events stand for what they stood for when they were waited for. Stream 0 is the framework's own: what is launched on it
  (and what torch computes on the CPU) is done at once, and to wait on it is to block.
- New memory has arbitrary values. A thread's first call makes a context on its current device. Memory that is freed while a
  capture could be spoilt is an error. What a kernel does is read from the table that it is launched with.
- A communicator's collective meets the other ranks when its stream comes to it, not when it is called, and reads the memory
  then; ranks that call different things are an error. To make a communicator blocks until all ranks have come. What it sent
  and nobody has taken yet is lost when it is aborted, and it must be aborted before it is collected.

What it does not show: that CUDA and NCCL take these arguments, how fast they are, the limit of a stream's queue, an error
that a GPU keeps, and memory that is reused after it is freed (it is kept until the test ends).
"""
