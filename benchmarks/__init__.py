"""What bpipe costs beside its alternatives: each study is a script that measures, tells and draws."""
