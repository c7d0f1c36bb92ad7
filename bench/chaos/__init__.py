"""Runs that are disturbed at random moments, and what became of each prompt.

__main__   the command line, and the table of results
campaign   one run of each schedule: faults in a random order, each with the outcome that is expected of it
pairs      a second fault, at an event that follows the first one
faults     what is done to a run, and what the run must do then
victim     the run as it is seen from outside: its processes, its steps, its errors
training   the run from inside: its configuration, and the roles that fail on order
spares     fork servers that are forks of the controller, for campaigns without imports
reward     what grades it
books      what must be true of a run when it has ended
report     the figures of campaigns, and the table of docs/reliability.md
leftovers  what must not be there when it has ended
"""
