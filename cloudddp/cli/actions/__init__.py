"""What the verbs do: functions of plain values, which get the console and the global options first."""
