"""The effects of the corrections in docs/corrections.md, measured: our form, the printed one and the coded one."""
