"""Sets up an AWS account for Penstock, checks it, and describes what it needs (`penstock aws`).

broker's URL, models, bucket ─▶ account.py: `Needs`; makes all of them, or tries what a process may do
    ─▶ producers.broker.sqs.setup, bucket.py    made, corrected or checked by API calls
    ─▶ template.py                              the same as a CloudFormation template
    ─▶ policies.py                              an IAM policy for each process
"""
