"""Two simulators on a virtual clock, seeded, of production code.

``run.simulate_run`` runs a whole run: coordinator, lane, ledger, workers and program hosts, with
``links`` between them, a ``crew`` of workers and ``whereabouts`` as the witness of true causes.
``world.simulate`` runs the lane and admission alone, which is enough for policies and twenty times
quicker: ``trace`` makes its work, ``device_model`` spends its time, ``policies`` are its peers.
Design 0012 says what is production code in each and what is not.
"""
