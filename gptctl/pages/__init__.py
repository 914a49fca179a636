"""Web pages of runs: pure functions from what is known of runs to one HTML file.

They know neither the command line nor files: whoever calls them reads and writes.
"""
