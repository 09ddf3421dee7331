"""Conformance suites, models and faults for those who write policies, backends and copy engines.

Who writes a backend shows three things:

1. It keeps the protocol: inherit from `backend_conformance.BackendConformance`.
2. A store on it stays right when it fails: open the store with
   `faults.faulty_backend_opener(plan, open_backend)`, where `open_backend` opens the backend, and
   let each of the `faults.BACKEND_CALLS` of a scenario fail, once, and from then on.
3. It stays right when its device fails: give it a `SystemCalls` for what it asks of the device, and
   open it with that of `faults.FaultPlan.open_system`. What a kill or a power cut leaves of its
   files is built by `crash`.

A secondary tier has a control half, too: inherit from `tier_conformance.TierConformance`.
"""
