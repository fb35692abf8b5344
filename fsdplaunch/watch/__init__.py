"""See a run: live, over a finished one, beside another, as a page. The launcher's side; never imports torch."""
