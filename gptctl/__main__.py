"""`python -m gptctl`"""

from gptctl.cli import main

main()
