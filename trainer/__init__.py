"""The training program. `errors`, `layout`, `config` and `estimate` are torch-free; gptctl imports those and nothing else of it."""
