"""Speculative decoding: where the drafts of a request's next tokens come from.

``options`` is what users write, and one way in: ``Speculation.build`` makes a ``Proposer``
(``proposer``), which the runner calls in a decode step. How drafts are verified is the runner's
(``runner.decode_step``), and does not depend on where they come from.
"""
