"""What the corrections of docs/corrections.md change, measured: our form beside the printed one and the coded one."""
