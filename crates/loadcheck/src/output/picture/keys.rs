//! What the colours and lines of a picture mean.

use super::plot::Plot;

/// Width of a mark in pixels.
pub(super) const MARK_WIDTH: f64 = 18.0;

/// What a colour or a line stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    /// An area of memory, by its index in `Dot::edges`.
    Kind(usize),
    Vram,
    Host,
    /// Unreclaimable memory of the first of two reports.
    Before,
    HostPeak,
    RssPeak,
    Start,
    Limit,
    Layers,
}

/// The keys of everything that is drawn in any plot.
pub(super) fn keys(plots: &[Plot<'_>]) -> Vec<Key> {
    let any = |is: &dyn Fn(&Plot<'_>) -> bool| plots.iter().any(is);
    let is_overlaid = any(&|plot| plot.panel.before.is_some());
    let all = [
        (is_overlaid, Key::Before),
        (any(&|plot| plot.panel.dots.iter().any(|dot| dot.host.is_some())), Key::Host),
        (any(&|plot| plot.panel.has_kind(0)), Key::Kind(0)),
        (any(&|plot| plot.panel.has_kind(1)), Key::Kind(1)),
        (any(&|plot| plot.panel.has_kind(2)), Key::Kind(2)),
        (any(&|plot| plot.vram.is_some()), Key::Vram),
        (any(&|plot| plot.panel.host_peak.is_some()), Key::HostPeak),
        (any(&|plot| plot.panel.rss_peak.is_some()), Key::RssPeak),
        (any(&|plot| plot.panel.start_bytes().is_some()), Key::Start),
        (any(&|plot| plot.has_limit()), Key::Limit),
        (any(&|plot| !plot.lanes().is_empty()), Key::Layers),
    ];
    all.into_iter().filter(|(is_drawn, _)| *is_drawn).map(|(_, key)| key).collect()
}

impl Key {
    /// As SVG, on a baseline at 0.
    pub(super) fn mark(self) -> String {
        let fill = |class: &str| {
            format!("<rect class=\"{class}\" x=\"1\" y=\"-10\" width=\"16\" height=\"11\" rx=\"2\"/>")
        };
        let line = |class: &str| format!("<path class=\"{class}\" d=\"M0-4.5h18\"/>");
        match self {
            Self::Kind(0) => fill("anon"),
            Self::Kind(1) => fill("shmem"),
            Self::Kind(_) => fill("file"),
            Self::Vram => fill("vram"),
            Self::Host => line("host"),
            Self::Before => line("before"),
            Self::HostPeak => "<circle class=\"peak\" cx=\"9\" cy=\"-4.5\" r=\"5\"/>".to_owned(),
            Self::RssPeak => "<circle class=\"ring\" cx=\"9\" cy=\"-4.5\" r=\"4\"/>".to_owned(),
            Self::Start => line("start"),
            Self::Limit => line("limit"),
            Self::Layers => "<rect class=\"even\" x=\"0\" y=\"-10\" width=\"9\" height=\"11\"/>\
                             <rect class=\"odd\" x=\"9\" y=\"-10\" width=\"9\" height=\"11\"/>"
                .to_owned(),
        }
    }

    /// In words.
    pub(super) fn text(self, plots: &[Plot<'_>]) -> String {
        let before = plots.iter().find_map(|plot| plot.panel.before.as_ref());
        let name = |index: usize| before.map(|before| before.names[index].clone());
        match self {
            Self::Kind(0) => "anonymous".to_owned(),
            Self::Kind(1) => "shared".to_owned(),
            Self::Kind(_) => "pages of files".to_owned(),
            Self::Vram => "device".to_owned(),
            Self::Host => name(1).unwrap_or_else(|| "unreclaimable".to_owned()),
            Self::Before => name(0).unwrap_or_default(),
            Self::HostPeak if before.is_some() => "peak".to_owned(),
            Self::HostPeak => "peak of unreclaimable memory".to_owned(),
            Self::RssPeak => "RSS peak".to_owned(),
            Self::Start => "RSS at the start".to_owned(),
            Self::Limit => "limit".to_owned(),
            Self::Layers => "layers".to_owned(),
        }
    }

    /// True if it has a value at each time.
    pub(super) fn is_series(self) -> bool {
        matches!(self, Self::Kind(_) | Self::Vram | Self::Host | Self::Before)
    }
}
