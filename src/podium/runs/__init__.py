"""What a run leaves on the disk, and the one reader of it.

config  directory  paths  named_files  checkpoints  ledger     written while the run goes on
reading  records                                               the one reader: state, settings, steps, rows
report  comparison  changes  export                            made of it
"""
