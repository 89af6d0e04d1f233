//! Median and 95th percentile.

use serde::{Deserialize, Serialize};

/// What is kept of many values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) p95: f64,
    pub(crate) count: usize,
}

impl Summary {
    /// Summarizes at least one value.
    pub(crate) fn of(values: &mut [f64]) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |percent: usize| values[(values.len() - 1) * percent / 100];
        Self { median: at(50), p95: at(95), count: values.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_and_the_95th_percentile_are_values_that_occurred() {
        let mut values: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        assert_eq!(Summary::of(&mut values), Summary { median: 50.0, p95: 95.0, count: 101 });
        assert_eq!(Summary::of(&mut [7.0]), Summary { median: 7.0, p95: 7.0, count: 1 });
    }
}
