"""`kvlane demo`, which is `python -m kvlane.demo`: real vLLM engines on this machine, cold, warm, killed, restarted.

`device.py` chooses CPU or GPU, `model.py` builds a small model, `engine.py` is one engine's process, `processes.py`
starts, asks and kills engines and the daemon, `scenarios.py` is what must hold, `__main__.py` runs it and writes what
came out.
"""
