"""What a run leaves on the disk, and the one reader of it.

config  run_writer  paths  named_files  checkpoints  ledger    written while the run goes on
run_reader                                                     the one reader: state, settings, steps, rows
report  curves                                                 made of what the reader returns
"""
