-- Bias of PPO's clipped objective due to the mismatch, one row per step and inner iteration.
-- Unit: that of the advantage; shares of the tokens with an advantage.
-- Needs: the pass current, advantages.
-- Source: arXiv 2605.14220: a loss that divides by the trainer's logprobs uses rho = rho* exp(-d), rho* = current / rollout.
--   b = f(rho) - f(rho*) with f = min(rho A, clip(rho, 0.8, 1.2) A); exponents are clamped to 20 nats.
-- Meaning: skew = sum b / sum |b|: near 0 the mismatch is noise, near -1 or 1 a one-sided bias. flipped_*: tokens clipped under
--   only one of the two ratios. Assumes clip bounds of 0.2; print the query to set your own, or use tim-trace objective, which
--   reads the run's loss.
SELECT run, step, iteration, num_tokens, mean_bias, mean_bias_positive, mean_bias_negative, mean_abs_bias, skew,
       flipped_to_clipped, flipped_to_free
FROM objective_steps('train', 'rollout', 'current', kind := 'ppo_clip', clip_low := 0.2, clip_high := 0.2)
ORDER BY run, step, iteration;
