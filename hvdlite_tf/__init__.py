"""The TensorFlow and Keras frontend: not written yet."""

raise ImportError("hvdlite's TensorFlow and Keras frontend has not been written yet; "
                  "hvdlite_torch (PyTorch) and hvdlite (NumPy arrays) work")
