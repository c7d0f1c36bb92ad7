"""Calls, from submission to result.

    endpoint.submit(...)                                       the controller, any thread
      │
      ▼
    WorkerGroup   waits until the arguments that are calls     group.py
      │           themselves have their results
      ▼
    ProcessCalls  packs the arguments, keeps an InFlight,      process_calls.py
      │           sends one Request to each rank
      ▼
    ProcessHandle.invoke ──▶ WorkerProcess.execute ──▶ Reply   backend.py, worker_process.py
                                                        │
    ProcessCalls  counts replies, finds the cause of    ◀┘     whichever thread the backend replies in
      │           a failure, ends the call
      ▼
    Call.result() unpacks and joins the results, or raises     call.py, the thread that asks

A call ends once. The first of these events decides how:

    the last rank's reply is there    the joined results, or DeadlineExceeded if the deadline has passed
    a rank raised                     EndpointError at once
    a rank raised what looks like a   held until the cause arrives, or all ranks are known to live; then
      consequence (a broken           EndpointError
      collective)
    a process ended                   WorkerDied at once, for every call that waits for that process
    the deadline passed               DeadlineExceeded, with the stacks of the ranks that have not replied
    the caller cancelled              CallCancelled; the ranks are told to drop the call
    the group restarted or closed     CallCancelled

Other ranks may still run a call that failed, and wait in a collective for the rank that raised. Once one of them does
so (siblings.py), the rank that raised is told to destroy its process groups. That frees its siblings, and the group is
broken until it restarts. While the others still compute, it is open whether they enter a collective, so the next call
waits to be sent. Where all ranks raise alike (a bad argument, say), nobody waits and nothing breaks, however far apart
in time they raise. No clock decides what an error means.
"""
