"""Operations of a tower's layers that are done in another way than stock does them, each as exact as stock."""
