"""Sets up an AWS account for Penstock, checks it, and says what it needs (`penstock aws`).

broker's URL, models, bucket ─▶ account.py: `Needs`, and all that is made for them
    ─▶ producers.broker.sqs.setup, bucket.py    made, corrected or checked by API calls
    ─▶ template.py                              the same as a CloudFormation template
    ─▶ policies.py                              an IAM policy for each process
"""
