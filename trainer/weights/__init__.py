"""Weights out and in: GPT-2 in the format of Hugging Face, and the names that others give weights.

    checkpoint -> export.py -> model.safetensors, config.json, tokenizer files
    files of others -> sources.py -> families.py -> importing.py -> checkpoint

Nothing in a file is executed or trusted: sizes, names and offsets are checked before they are used.
"""
