"""`kvlane demo`, which is `python -m kvlane.demo`: real vLLM engines on this machine, cold, warm, killed, restarted.

`device.py` chooses CPU or GPU, `model.py` builds a small model, and `engine.py` is one engine's process. `processes.py`
starts, commands and kills engines and the daemon. `scenarios.py` has the scenarios and their checks; `__main__.py` runs
them and writes the results.
"""
