"""The control socket of `specd ctl`: HTTP and JSON over a Unix socket. Never on TCP; no torch."""
