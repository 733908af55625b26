"""What operators are held against: workloads, operations, rivals, copies; measured in turn."""
