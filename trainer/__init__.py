"""The training program. gptctl imports only its torch-free half.

The torch-free modules are `errors`, `layout`, `layout_rules`, `config`, `estimate`, `memory`,
`tape`, `sender`, `collectives`, `logline`, `durable`, `checksums` and `rank_log`.
"""
