"""The numeric operations of KVDrive. One package per operation: its contract, a plain PyTorch twin, fast versions.

The device of the tensors decides which implementation runs (`dispatch.Kernel`).
"""
