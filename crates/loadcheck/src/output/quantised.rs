//! What quantising lost, in a few lines: how many tensors, and the worst of them.

use super::escape::escape;
use crate::numbers::count;
use crate::report::QuantisedTensor;

/// Tensors that are shown.
const SHOWN_MAX: usize = 3;

/// `quantised 196 tensors; most lost, by RMS:` and a line for each of the worst, largest RMS first.
pub(crate) fn lines(tensors: &[QuantisedTensor]) -> Vec<String> {
    if tensors.is_empty() {
        return Vec::new();
    }
    let mut worst: Vec<&QuantisedTensor> = tensors.iter().collect();
    worst.sort_by(|left, right| {
        right.rms_error.total_cmp(&left.rms_error).then_with(|| left.name.cmp(&right.name))
    });
    let total = u64::try_from(tensors.len()).unwrap_or(u64::MAX);
    let mut lines =
        vec![format!("quantised {}; RMS and largest error of the worst:", count(total, "tensor"))];
    lines.extend(worst.iter().take(SHOWN_MAX).map(|tensor| {
        format!(
            "          {:.3e}  {:.3e}  {} (largest element {:.3e})",
            tensor.rms_error,
            tensor.max_abs_error,
            escape(&tensor.name),
            tensor.max_abs
        )
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_come_first_and_nothing_is_said_of_nothing() {
        assert!(lines(&[]).is_empty());
        let tensor = |name: &str, rms_error: f32| QuantisedTensor {
            name: name.to_owned(),
            elements: 4,
            max_abs: 2.0,
            max_abs_error: 2.0 * rms_error,
            rms_error,
        };
        let tensors = [tensor("a", 0.001), tensor("b", 0.1), tensor("d", 0.01), tensor("c", 0.01)];
        assert_eq!(
            lines(&tensors),
            [
                "quantised 4 tensors; RMS and largest error of the worst:",
                "          1.000e-1  2.000e-1  b (largest element 2.000e0)",
                "          1.000e-2  2.000e-2  c (largest element 2.000e0)",
                "          1.000e-2  2.000e-2  d (largest element 2.000e0)",
            ]
        );
    }
}
