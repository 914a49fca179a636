"""The training program. gptctl imports only its torch-free half.

The torch-free modules are `errors`, `layout`, `layout_rules`, `config`, `estimate`, `memory`,
`tape`, `rank_plan`, `logit_chunks`, `collectives`, `savings`, `logline`, `durable`, `checksums`,
`cache_folder`, `trace_files` and `rank_log`.
"""
