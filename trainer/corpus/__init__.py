"""From text to token files, and back. Torch-free; numpy is imported where it is needed."""
