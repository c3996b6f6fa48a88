"""The command line.

main, commands/    what can be typed: verbs, options, help. They import nothing that takes long but click
actions/           what each verb does: plain functions, imported when their verb is invoked
views/             results as text for people and as JSON for programs
console            every message
session            settings, the account and the cluster, as the global options choose them
entry_point        the one place that turns errors into messages and exit codes
"""
