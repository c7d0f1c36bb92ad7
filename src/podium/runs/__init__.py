"""What a run leaves on the disk, and the one reader of it.

config  directory  paths  named_files  checkpoints  ledger     written while the run goes on
records                                                        what a directory says: state, settings, steps
report  comparison  changes  export                            made of it
"""
