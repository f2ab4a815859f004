"""Plans what each step computes. Plain Python, no torch.

submit: limits refuses requests that could never run, by the model's traits; group makes a sequence of each choice;
policy queues them
plan: planner fills the step's token budget and allocates KV blocks, in the order of policy (tiers, tenants), and
     preempts running sequences if it must
update: scheduler appends the sampled tokens, makes the events and frees the blocks of finished sequences; group picks
        among the candidates of best_of, and beams are searched for in place of choices
"""
