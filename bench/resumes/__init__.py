"""Runs with settings drawn at random that are ended at a random moment, resumed, and compared with whole runs.

__main__    the command line: `python -m bench.resumes --cases 50`
draws       settings of a run, and the moments at which it is ended, from a seed
attempts    one start of a run, in a fork of this process that may be killed
comparison  what must be the same in both runs
"""
