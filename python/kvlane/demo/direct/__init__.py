"""The demo of direct hand-offs: prefill and decode engines with no daemon and no router between."""
