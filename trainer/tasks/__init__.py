"""What can be done with a trained model, each a program: `python -m trainer.tasks.NAME`.

gptctl starts them for its verbs `eval`, `generate`, `serve`, `export` and `import`.
"""
