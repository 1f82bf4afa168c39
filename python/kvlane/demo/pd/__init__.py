"""Prefill and decode engines behind `kvlane route`, on this machine's CPU: the parts of examples/run_pd.py."""
