"""Machine nodes: Debian 13 with its own systemd, cloud-init and OpenSSH, booted by systemd-nspawn as root."""
