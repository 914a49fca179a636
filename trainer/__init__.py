"""The training program. Its torch-free half (`errors`, `layout`, `config`, `estimate`) is all that gptctl imports."""
