"""Prefill and decode engines behind `kvlane route`, on this machine's CPU: what examples/run_pd.py is made of."""
