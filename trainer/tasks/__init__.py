"""What can be done besides training, each a program: `python -m trainer.tasks.NAME`.

gptctl starts them for its verbs `eval`, `generate`, `serve`, `export` and `import`, and for `data
prepare` and `data train-tokenizer` as jobs.
"""
