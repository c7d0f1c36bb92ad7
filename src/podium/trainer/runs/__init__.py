"""What a run leaves on the disk, and those who read it.

directory  path  places  checkpoints  ledger     written while the run goes on
report  comparison  changes  export              made of it
"""
