"""Actuators on AWS: an ECS service (`ecs`), an EC2 Auto Scaling group (`ec2`).

    actual, scale ─▶ a thread with boto3's client ─▶ AWS; its refusals name the action that the role lacks

Neither hands out work: a worker that goes drains by SIGTERM, or by what its instance's metadata say. What each process
may do in AWS is in `producers/aws/policies.py`.
"""
