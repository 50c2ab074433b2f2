"""Metadata; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "hvdlite/_version.py").read_text(encoding="utf-8")).group(1)
REPOSITORY = "https://github.com/hvdlite/hvdlite"  # nowhere else
AUTOTUNE = ["optuna>=3.6"]
CHECKPOINTS = ["safetensors>=0.4.5"]
NVML = "nvidia-ml-py>=12.535,<14"  # what hvdrun --doctor tells about GPUs
RAY, SPARK, PLOT = ["ray>=2.9"], ["pyspark>=3.4"], ["matplotlib>=3.7"]
TORCH, MPI = ["torch>=2.4"], ["mpi4py>=4.1"]
KERAS = ["keras>=3.8"]  # with any backend
TENSORFLOW, JAX = ["tensorflow>=2.16", *KERAS], ["jax>=0.4.36", *KERAS]
LIGHTNING = [*TORCH, "lightning>=2.2"]
HUGGING_FACE = ["accelerate>=1.4", "transformers>=5"]
SITE = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"]
BENCH = [*MPI, "mpich>=4.2", *PLOT]
TEST = [*AUTOTUNE, *CHECKPOINTS, *LIGHTNING, *HUGGING_FACE, *RAY, *SPARK, *BENCH, "pytest>=8", "pytest-timeout>=2.3",
        "pytest-xdist>=3.5", "hypothesis>=6.100", "ruff>=0.6", "mypy>=1.11", "import-linter>=2.1", *SITE,
        "nbclient>=0.10", "ipykernel>=6.29",
        "build>=1.2", "twine>=5", "check-wheel-contents>=0.6"]



def description() -> str:
    """Return the README for the package index, where relative links lead nowhere: they name this version's files."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({REPOSITORY}/blob/v{VERSION}/", text)


setup(
    name="hvdlite",
    version=VERSION,
    description="Data-parallel training with Horovod's programming model, in pure Python",
    long_description=description(),
    long_description_content_type="text/markdown",
    author="The hvdlite authors",
    url=REPOSITORY,
    project_urls={"Source": REPOSITORY, "Documentation": f"{REPOSITORY}/tree/v{VERSION}/docs",
                  "Changelog": f"{REPOSITORY}/blob/v{VERSION}/CHANGELOG.md", "Issues": f"{REPOSITORY}/issues"},
    license_expression="Apache-2.0",  # instead of a classifier
    python_requires=">=3.10",
    # A top-level module called `runner` would collide on people's machines, so the folder is installed under this name.
    packages=[*find_packages(include=["hvdlite", "hvdlite.*", "hvdlite_torch", "hvdlite_torch.*", "hvdlite_tf",
                                      "hvdlite_tf.*"]),
              "hvdlite_runner", *(f"hvdlite_runner.{name}" for name in find_packages("runner"))],
    package_dir={"hvdlite_runner": "runner"},
    package_data={"hvdlite": ["py.typed", "horovod_compat/path/horovod/__init__.py"],
                  "hvdlite_torch": ["py.typed"], "hvdlite_tf": ["py.typed"], "hvdlite_runner": ["py.typed"],
                  "hvdlite_runner.agents": ["ssh_config"]},
    install_requires=["numpy>=1.24", "ml_dtypes>=0.3.1", "msgspec>=0.18", "cloudpickle>=2.2", "pyyaml>=6"],
    extras_require={
        "torch": TORCH,
        "lightning": LIGHTNING,
        "tensorflow": TENSORFLOW,
        "keras": KERAS,
        "jax": JAX,
        "mpi": MPI,
        # NVRTC compiles the kernels, and CuPy wants the headers of CUDA's runtime for every kernel. Torch for the same CUDA
        # version brings both, and NCCL, too.
        "nccl-cuda12": ["cupy-cuda12x>=14", "nvidia-nccl-cu12>=2.26.2", "nvidia-cuda-nvrtc-cu12",
                        "nvidia-cuda-runtime-cu12", NVML],
        "nccl-cuda13": ["cupy-cuda13x>=14", "nvidia-nccl-cu13>=2.27.7", "nvidia-cuda-nvrtc>=13,<14",
                        "nvidia-cuda-runtime>=13,<14", NVML],
        "checkpoints": CHECKPOINTS,
        "autotune": AUTOTUNE,
        "ray": RAY,
        "spark": SPARK,
        "plot": PLOT,
        "all": [*LIGHTNING, *TENSORFLOW, *JAX, *MPI, *CHECKPOINTS, *AUTOTUNE, *RAY, *SPARK, *PLOT],  # nccl-*: one of the two
        "bench": BENCH,
        "dev": TEST,
    },
    entry_points={
        "console_scripts": ["hvdrun = hvdlite_runner.__main__:main"],
        "torch.backends": ["hvdlite = hvdlite_torch.distributed.registration:register"],  # at the end of `import torch`
    },
    keywords=["horovod", "distributed training", "data parallel", "deep learning", "pytorch", "tensorflow", "keras", "jax",
              "numpy", "allreduce", "nccl", "gloo", "mpi", "elastic training", "slurm"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: GPU :: NVIDIA CUDA :: 12",
        "Environment :: GPU :: NVIDIA CUDA :: 13",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 16)),
        "Programming Language :: Python :: Implementation :: CPython",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
