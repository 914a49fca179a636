"""The training program. gptctl imports only its torch-free half.

The torch-free modules are `errors`, `layout`, `layout_rules`, `config`, `estimate`, `logline`,
`durable` and `rank_log`.
"""
