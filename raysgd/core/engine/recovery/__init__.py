"""The recovery from a failure as a table of states and events, without anything that waits or acts."""
