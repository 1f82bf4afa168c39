"""The demo of two hosts whose daemons lend each other blocks. `make demo-cluster` runs it."""
