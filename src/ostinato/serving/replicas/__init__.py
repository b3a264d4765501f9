"""Several replicas behind one server: Ray Serve deployments, chosen by prefix and load.

Needs ``ostinato[ray]``, except ``prefix_placement`` and ``prompt_prefix``.
"""
