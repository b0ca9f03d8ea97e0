"""What people see of a plan: its table and page, schedules, measured machines, simulations. Torch-free."""
