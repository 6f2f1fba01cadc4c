"""What binds a running cluster now: several looks at its status, and a judgement of them.

looks.py makes a Window of looks, rules.py a Finding of each cause, judge.py the Diagnosis, and
drawing.py the text of `headwater diagnose` (cluster/commands/diagnose.py). All of it is pure.
"""
