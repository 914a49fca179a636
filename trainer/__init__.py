"""The training program. gptctl imports only its torch-free half.

The torch-free modules are `errors`, `layout`, `config`, `estimate`, `logline` and `durable`.
"""
