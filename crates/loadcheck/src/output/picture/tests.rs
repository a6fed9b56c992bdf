use std::time::Duration;

use super::*;
use crate::report::{
    Deliveries, Delivery, IoCounters, Limit, Outcome, Params, Peak, Place, Point, Promise, Run, Samples,
    Source, Verdict,
};

const MIB: u64 = 1 << 20;

/// Sizes are promised for whatever a report holds.
const PAGE_BYTES_MAX: usize = 512 << 10;
const PICTURE_BYTES_MAX: usize = 300 << 10;

/// A load of `layers` layers in two seconds: memory climbs to a plateau, and file pages come and
/// go.
fn run(layers: u64, samples: u64, name: &dyn Fn(u64) -> String) -> Run {
    let columns = ["elapsed_us", "host_bytes", "rss_bytes", "anon_bytes", "file_bytes", "shmem_bytes"];
    let rows = (0..samples).map(|index| {
        let anon = (8 + 64 * index.min(samples / 4) / (samples / 4).max(1)) * MIB;
        let (file, shmem) = ((5 + index % 7) * MIB, index / 3 % 2 * MIB);
        let all = [2_000_000 * index / samples, anon + shmem, anon + shmem + file, anon, file, shmem];
        all.map(Some).to_vec()
    });
    let deliveries = Deliveries {
        layers,
        layers_per_row: 1,
        rows: (0..layers)
            .map(|layer| Delivery {
                layer: name(layer),
                elapsed_us: 100_000 + 1_900_000 * layer / layers.max(1),
                bytes: Some(10 * MIB),
                read_bytes: Some(10 * MIB),
                from_cache_bytes: Some(5 * MIB),
            })
            .collect(),
    };
    let place = |seconds| Some(Place { layer: Some(name(layers / 2)), tensor: None, seconds });
    Run {
        strategy: "stream".to_owned(),
        params: Some(Params {
            budget_bytes: 64 * MIB,
            prefetch: 2,
            window: Some(1),
            window_bytes: None,
            passes: None,
            io: "auto".to_owned(),
            device: "host".to_owned(),
            readers: Some(2),
            hash: false,
            verify: false,
            dtype: None,
            quantise: None,
            tp: None,
            device_budget_bytes: None,
            device_reserve_bytes: None,
        }),
        outcome: Outcome::Completed,
        seconds: Some(2.0),
        baseline: Point { host_bytes: Some(5 * MIB), rss_bytes: Some(8 * MIB), ..Point::default() },
        peak: Peak {
            host_bytes: Some(73 * MIB),
            rss_bytes: Some(84 * MIB),
            at: place(0.7),
            rss_at: place(1.1),
            ..Peak::default()
        },
        promise: Some(Promise { limit_bytes: 80 * MIB, growth_bytes: 76 * MIB, kept: true }),
        samples: Some(Samples {
            interval_ms: 5.0,
            columns: columns.map(str::to_owned).to_vec(),
            rows: rows.collect(),
        }),
        deliveries: Some(deliveries),
        io: IoCounters { read_bytes: Some(800 * MIB), ..IoCounters::default() },
        ..Run::default()
    }
}

fn layer(index: u64) -> String {
    format!("model.layers.{index}")
}

fn report(runs: Vec<Run>) -> Report {
    let mut report = Report::new(CommandName::Run);
    report.tool.version = "0.0.0".to_owned();
    let bytes = Some(800 * MIB);
    report.source = Some(Source { given: "models/small".to_owned(), bytes, ..Source::default() });
    report.runs = runs;
    report.answer = crate::answers::answer(&report);
    report
}

/// What is wrong with it as XML: tags that do not match, characters that are none, names that broke
/// out.
fn check_xml(text: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('<') {
        let between = &rest[..at];
        for entity in between.split('&').skip(1) {
            let known = ["amp;", "lt;", "gt;", "quot;", "#39;"];
            assert!(known.iter().any(|known| entity.starts_with(known)), "&{entity}");
        }
        assert!(!between.contains('>') || open.last() == Some(&"style"), "{between}");
        let end = rest[at..].find('>').expect("tags end") + at;
        let tag = &rest[at + 1..end];
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "at {tag}");
        } else if !tag.ends_with('/') && !tag.starts_with('!') && !tag.starts_with("meta ") {
            open.push(tag.split_whitespace().next().unwrap());
        }
    }
    assert!(open.is_empty(), "{open:?}");
    let bad = |c: char| (c.is_control() && c != '\n') || matches!(c, '\u{fffe}' | '\u{ffff}');
    assert!(!text.contains(bad));
}

/// Holds both to what is promised of any: small, sound, and nothing in it leads elsewhere.
fn check(report: &Report) -> (String, String) {
    let (svg, html) = (svg(report), html(report));
    assert!(svg.len() < PICTURE_BYTES_MAX, "{} bytes", svg.len());
    assert!(html.len() < PAGE_BYTES_MAX, "{} bytes", html.len());
    check_xml(&svg);
    check_xml(&without_our_code(&html));
    let namespace = "xmlns=\"http://www.w3.org/2000/svg\"";
    for text in [svg.replacen(namespace, "", 1), without_our_code(&html)] {
        let elsewhere = text.replacen("http-equiv=", "", 1).to_lowercase();
        for word in [
            "http", "//", "url(", "@import", "<script", "<link", "<img", "<use", "href=", "src=", "onload",
            "style=",
        ] {
            assert!(!elsewhere.contains(word), "{word}");
        }
        for number in ["NaN", "inf ", "inf\""] {
            assert!(!text.contains(number), "{number}");
        }
    }
    (svg, html)
}

/// The page without its script and its layout, and without the data of the script: numbers and
/// names, as JSON.
fn without_our_code(html: &str) -> String {
    const DATA: &str = "<script type=\"application/json\">";
    let mut rest = html.to_owned();
    for ours in [include_str!("page.js"), include_str!("page.css")] {
        assert_eq!(rest.matches(ours).count(), 1);
        rest = rest.replacen(ours, "", 1);
    }
    rest = rest.replacen("<script>\n</script>", "", 1);
    assert_eq!(rest.matches(DATA).count(), rest.matches("class=\"stage\"").count());
    while let Some(at) = rest.find(DATA) {
        let end = at + rest[at..].find("</script>").unwrap();
        let data: serde_json::Value = serde_json::from_str(&rest[at + DATA.len()..end]).unwrap();
        assert!(data["series"].is_array(), "{data}");
        assert!(!rest[at + DATA.len()..end].contains('<'));
        rest.replace_range(at..end + "</script>".len(), "");
    }
    rest
}

#[test]
fn the_picture_of_a_load() {
    let (svg, html) = check(&report(vec![run(6, 40, &layer)]));
    insta::with_settings!({ prepend_module_to_snapshot => false, snapshot_path => "../../../tests/cli/output" }, {
        insta::assert_snapshot!("timeline_svg", svg);
        let page = without_our_code(&html);
        let (before, policy) = page.split_once("style-src").unwrap();
        let (_, after) = policy.split_once("; base-uri").unwrap();
        insta::assert_snapshot!("timeline_html", format!("{before}[two hashes]; base-uri{after}"));
    });
    for text in [
        "PASS",
        "64 MiB",
        "<th scope=\"row\">promised at most</th><td>80 MiB, kept</td>",
        "400 MiB/s",
        "prefers-color-scheme",
    ] {
        assert!(html.contains(text), "{text}");
    }
    assert!(svg.contains("RSS limit 88 MiB = start 8 MiB + budget 64 MiB + 16 MiB"), "{svg}");
    assert!(svg.contains("<title>model.layers.2: delivered at 733 ms, unreclaimable memory then"), "{svg}");
    assert!(
        svg.contains("peak of unreclaimable memory 73 MiB (68 MiB over start) at 700 ms, model.layers.3"),
        "{svg}"
    );
}

#[test]
fn device_memory_is_a_strip_of_its_own_at_its_own_scale() {
    let on_device = |samples| {
        let mut run = run(6, samples, &layer);
        let steps: Vec<(Duration, u64)> = (0..6)
            .map(|layer| (Duration::from_millis(100 + 300 * layer), (1 + layer) * 1024 * MIB))
            .collect();
        run.samples = run.samples.map(|samples| samples.with_vram(&steps));
        (run.baseline.vram_bytes, run.peak.vram_bytes) = (Some(300 * MIB), Some(7000 * MIB));
        run
    };
    let samples = on_device(40).samples.unwrap();
    let cell = |row: usize| (samples.rows[row][0], samples.rows[row][6]);
    assert_eq!((samples.columns[6].as_str(), cell(0)), ("vram_bytes", (Some(0), None)));
    assert_eq!(cell(2), (Some(100_000), Some(1024 * MIB)), "from the moment of the change on");
    assert_eq!(cell(39), (Some(1_950_000), Some(6 * 1024 * MIB)));
    let (svg, html) = check(&report(vec![on_device(40)]));
    assert_eq!(svg.matches("<path class=\"vram\"").count(), 1, "{svg}");
    for text in [
        "host memory (MiB)",
        "device memory (GiB)",
        ">device<",
        "device peak 7 000 MiB (6 700 MiB over start)",
    ] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    assert!(!html.contains("Device memory is not drawn"), "{html}");
    let (svg, html) = check(&report(vec![on_device(0)]));
    assert!(!svg.contains("device memory (") && html.contains("Device memory is not drawn"), "{html}");
    // Beside a run without it, and many of them.
    let (svg, _) = check(&report(vec![on_device(4096), run(6, 40, &layer), on_device(4096)]));
    assert_eq!(svg.matches("<path class=\"vram\"").count(), 2);
}

#[test]
fn a_thousand_layers_and_the_longest_run_stay_small() {
    for (layers, samples, runs) in
        [(1000, 4096, 1), (1000, 4096, 4), (1000, 4096, 40), (0, 1, 1), (1, 0, 1), (1, 3, 2)]
    {
        let runs = (0..runs).map(|_| run(layers, samples, &layer)).collect();
        let (svg, html) = check(&report(runs));
        println!("{layers} layers, {samples} samples: {} and {} bytes", svg.len(), html.len());
    }
    let (svg, _) = check(&report(vec![run(1000, 4096, &layer)]));
    let cells = svg.matches("delivered at").count();
    assert!((100..=200).contains(&cells), "{cells} cells for a thousand layers");
    assert!(svg.contains("<title>model.layers.1 to model.layers."), "{svg}");
}

#[test]
fn names_cannot_break_out() {
    let hostile = "</title></svg>\"><script>alert('&')</script>\u{1b}[2J\u{202e}\u{0}\u{ffff}".repeat(12);
    let name = |index: u64| format!("{index}{hostile}");
    let mut found = report(vec![run(1000, 4096, &name)]);
    found.source.as_mut().unwrap().given = hostile.clone();
    found.tool.name = hostile.clone();
    found.notes = vec![hostile.clone(); 1000];
    found.limits = vec![limit(&hostile); 100];
    found.runs[0].strategy = hostile.clone();
    found.runs[0].params.as_mut().unwrap().io = hostile.clone();
    let mut problem = crate::problem::Problem::new(crate::problem::Code::SourceInvalid, hostile.as_str());
    problem.place = Some(hostile.clone());
    found.fail(vec![problem; 100]);
    let (svg, _) = check(&found);
    assert!(svg.contains("&lt;"), "{svg}");
    found.command = CommandName::Compare;
    found.runs =
        (0..50).map(|row| Run { strategy: format!("{row}{hostile}"), ..found.runs[0].clone() }).collect();
    check(&found);
}

fn limit(metric: &str) -> Limit {
    Limit {
        metric: metric.to_owned(),
        limit_bytes: Some(100 * MIB),
        actual_bytes: Some(73 * MIB),
        limit_seconds: None,
        actual_seconds: None,
        passed: true,
        inside_spread: false,
        first_exceeded_at: None,
    }
}

#[test]
fn numbers_that_make_no_sense_make_no_picture_that_does_not_either() {
    let mut wild = run(3, 8, &layer);
    let samples = wild.samples.as_mut().unwrap();
    samples.rows[0] = vec![Some(u64::MAX); 6];
    samples.rows[1] = vec![];
    samples.rows[2] = vec![None; 9];
    samples.rows[3] = vec![Some(5), None, None, Some(1), None, None];
    wild.peak.at.as_mut().unwrap().seconds = 1e300;
    wild.peak.host_bytes = Some(u64::MAX);
    wild.deliveries.as_mut().unwrap().rows[0].elapsed_us = u64::MAX;
    wild.deliveries.as_mut().unwrap().layers = 1;
    check(&report(vec![wild.clone()]));
    wild.samples.as_mut().unwrap().columns.clear();
    check(&report(vec![wild]));
    let (svg, html) = check(&report(vec![]));
    assert!(svg.contains("nothing was measured") && !html.contains("<svg"), "{svg}");
}

#[test]
fn limits_are_lines_where_they_can_be_and_words_where_not() {
    let mut found = report(vec![run(6, 40, &layer)]);
    found.limits = vec![limit("host"), Limit { limit_bytes: Some(1 << 40), ..limit("rss") }, limit("time")];
    found.verdict = Verdict::Fail;
    let (svg, html) = check(&found);
    assert_eq!(
        svg.matches("<path class=\"limit\"").count(),
        3,
        "the promise, --max-memory, the legend: {svg}"
    );
    assert!(
        svg.contains("--max-memory 100 MiB") && svg.contains("--max-peak-rss 1 TiB (above the picture)"),
        "{svg}"
    );
    assert!(html.contains(">FAIL<"));
}

#[test]
fn of_many_runs_the_highest_and_the_median_are_drawn() {
    let runs: Vec<Run> = (0..9_u32)
        .map(|number| {
            let mut run = run(2, 10, &layer);
            run.seconds = Some(f64::from(number));
            run.peak.host_bytes = Some(if number == 7 { 90 * MIB } else { 73 * MIB });
            run
        })
        .collect();
    let (svg, html) = check(&report(runs.clone()));
    assert!(svg.contains(">run 8 of 9, the highest peak<") && svg.contains(">run 5 of 9, the median time<"));
    assert!(
        html.contains("Two of 9 runs are drawn.") && html.contains("unreclaimable memory at most 90 MiB")
    );
    let (svg, _) = check(&report(runs[..3].to_vec()));
    assert_eq!(svg.matches(">run ").count(), 3);
    let mut compared = report(runs);
    compared.command = CommandName::Compare;
    for (index, run) in compared.runs.iter_mut().enumerate() {
        run.strategy = ["stream", "mmap", "read"][index % 3].to_owned();
    }
    let (svg, html) = check(&compared);
    assert!(
        svg.contains(">mmap<") && html.contains("<th scope=\"col\">mmap</th><th scope=\"col\">read</th>"),
        "{html}"
    );
    assert!(html.contains("Of each row, the run with the highest peak."));
}

#[test]
fn texts_that_do_not_fit_lose_their_middle_and_take_turns() {
    use super::labels::{Area, Room, fitted, lines, text_width};
    assert_eq!(fitted("short", 12.0, 100.0), "short");
    let cut = fitted("a-very-long-name-of-a-checkpoint", 12.0, 100.0);
    assert!(cut.starts_with("a-very") && cut.contains('…') && cut.ends_with("nt"), "{cut}");
    assert!(text_width(&cut, 12.0) <= 100.0);
    let parts = ["one".to_owned(), "two".to_owned(), String::new(), "three".to_owned()];
    assert_eq!(lines(&parts, " · ", 10.0, 60.0), ["one · two", "three"]);
    let frame = Area { left: 0.0, right: 100.0, top: 0.0, bottom: 100.0 };
    let mut room = Room::new(frame);
    let here = Area::of_text(10.0, 50.0, 40.0, 12.0);
    let there = Area::of_text(10.0, 80.0, 40.0, 12.0);
    assert!((room.take(&[here, there]).unwrap().top - here.top).abs() < 1e-9);
    assert!((room.take(&[here, there]).unwrap().top - there.top).abs() < 1e-9);
    assert!(room.take(&[here, there, Area::of_text(90.0, 20.0, 40.0, 12.0)]).is_none());
}

/// The most device memory is not where the most host memory is, and both are drawn.
#[test]
fn thinning_keeps_the_highest_of_either_memory() {
    let mut run = run(4, 400, &|layer| format!("layers.{layer}"));
    let samples = run.samples.as_mut().unwrap();
    samples.columns.push("vram_bytes".to_owned());
    for (index, row) in samples.rows.iter_mut().enumerate() {
        row.push(Some(if index == 203 { 900 * MIB } else { 100 * MIB }));
        // Beside it, the host has more.
        if index == 202 {
            row[1] = Some(500 * MIB);
        }
    }
    let report = Report { runs: vec![run], ..Report::new(CommandName::Run) };
    let (panels, _) = panel::panels(&report);
    let thinned = panel::thinned(&panels[0].dots, panels[0].end_seconds(), 20);
    assert!(thinned.len() <= 21, "{}", thinned.len());
    let most = |of: fn(&panel::Dot) -> Option<f64>| thinned.iter().filter_map(of).reduce(f64::max);
    let mib = |count: u64| Some(crate::numbers::to_f64(count * MIB));
    assert_eq!((most(|dot| dot.vram), most(|dot| dot.host)), (mib(900), mib(500)));
}

/// Every text of a drawing and the area that it may take, by the estimate that places it.
fn texts_of(svg: &str) -> Vec<(String, labels::Area)> {
    let attribute = |tag: &str, name: &str| {
        let from = tag.find(&format!(" {name}=\"")).map(|at| at + name.len() + 3)?;
        Some(tag[from..].split('"').next().unwrap().to_owned())
    };
    let texts = svg.split("<text ").skip(1).map(|part| {
        let (tag, rest) = part.split_once('>').unwrap();
        let (tag, text) = (format!(" {tag}"), rest.split('<').next().unwrap());
        let number = |name: &str| attribute(&tag, name).unwrap().parse::<f64>().unwrap();
        let (size, width) = (number("font-size"), labels::text_width(text, number("font-size")));
        let left = match attribute(&tag, "text-anchor").as_deref() {
            Some("middle") => number("x") - width / 2.0,
            Some("end") => number("x") - width,
            _ => number("x"),
        };
        (text.to_owned(), labels::Area::of_text(left, number("y"), width, size))
    });
    texts.collect()
}

#[test]
fn no_label_covers_another() {
    for (host_mib, rss_mib, limit_mib, at) in
        [(73, 73, 74, 0.0), (73, 74, 90, 2.0), (73, 84, 84, 1.0), (9, 10, 11, 0.01), (73, 80, 73, 1.99)]
    {
        let mut run = run(6, 40, &layer);
        (run.peak.host_bytes, run.peak.rss_bytes) = (Some(host_mib * MIB), Some(rss_mib * MIB));
        let place = Some(Place { layer: None, tensor: None, seconds: at });
        (run.peak.at, run.peak.rss_at) = (place.clone(), place);
        let mut found = report(vec![run]);
        found.limits = ["host", "rss"]
            .map(|metric| Limit { limit_bytes: Some(limit_mib * MIB), ..limit(metric) })
            .into();
        let (panels, _) = panel::panels(&found);
        let plots = drawing::page_plots(&panels, drawing::Shape::Wide);
        let texts = texts_of(&drawing::inline(&plots[0], drawing::Shape::Wide, 1, ""));
        assert!(texts.iter().any(|(text, _)| text.starts_with("unreclaimable")), "the peak is named");
        for (index, (one, area)) in texts.iter().enumerate() {
            for (other, other_area) in &texts[index + 1..] {
                assert!(
                    !area.meets(other_area),
                    "{one} / {other} of {host_mib}, {rss_mib}, {limit_mib}, {at}"
                );
            }
        }
    }
}

#[test]
fn the_page_opens_with_the_answer_and_has_layers_as_a_table() {
    let mut found = report(vec![run(6, 40, &layer)]);
    found.host = Some(crate::report::Host {
        cgroup: Some(crate::report::Cgroup { version: 2, limit_bytes: Some(128 * MIB) }),
        ..Default::default()
    });
    let (svg, html) = check(&found);
    assert!(svg.contains(">container limit 128 MiB<"), "{svg}");
    let answer = "<h1>Loading needs 73 MiB of unreclaimable memory; a container of 192 MiB is enough.</h1>";
    let row = "<th scope=\"row\">model.layers.1</th><td class=\"n\" data-value=\"10485760\">10 MiB</td>";
    for text in
        [answer, row, ">50 %</td>", ">32 MiB/s</td>", "<caption>Layers, in the order of delivery</caption>"]
    {
        assert!(html.contains(text), "{text}: {html}");
    }
    assert!(html.find("<h1>") < html.find("<svg"));
    // Reports of earlier versions have no bytes of layers: no such columns.
    for row in &mut found.runs[0].deliveries.as_mut().unwrap().rows {
        (row.bytes, row.read_bytes, row.from_cache_bytes) = (None, None, None);
    }
    let (_, html) = check(&found);
    assert!(html.contains(">delivered at</th>") && !html.contains(">from cache</th>"), "{html}");
}

#[test]
fn the_policy_allows_the_script_and_the_style_of_the_page_alone() {
    use sha2::Digest as _;
    let html = html(&report(vec![run(6, 40, &layer)]));
    let (_, policy) = html.split_once("Content-Security-Policy\" content=\"").unwrap();
    let policy = policy.split('"').next().unwrap();
    assert!(policy.starts_with("default-src 'none'; style-src 'sha256-"), "{policy}");
    assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
    for name in ["style", "script"] {
        let (_, text) = html.split_once(&format!("<{name}>")).unwrap();
        let text = text.split_once(&format!("</{name}>")).unwrap().0;
        let hash = page::base64(&sha2::Sha256::digest(text));
        assert!(policy.contains(&format!("{name}-src 'sha256-{hash}'")), "{name} {hash}: {policy}");
    }
}

#[test]
fn two_reports_are_laid_over_each_other() {
    let (before, mut after) = (run(6, 40, &layer), run(6, 400, &layer));
    after.peak.host_bytes = Some(40 * MIB);
    after.params.as_mut().unwrap().budget_bytes = 32 * MIB;
    after.seconds = Some(1.0);
    let names = ["a<b>.json".to_owned(), "b.json".to_owned()];
    let changed = |before: Report, after: Report| crate::compare::changes(before, after, names.clone());
    let mut found = changed(report(vec![before.clone(), before.clone()]), report(vec![after])).unwrap();
    found.answer = crate::answers::answer(&found);
    let (svg, html) = check(&found);
    for (class, count) in [("before", 1), ("host", 1), ("anon", 0), ("edge", 0)] {
        let lines = svg.matches(&format!("<path class=\"{class}\" d=\"M0-4.5")).count();
        let curves = svg.matches(&format!("<path class=\"{class}\"")).count() - lines;
        assert_eq!(curves, count, "{class}");
    }
    let sentence = "<h1>Unreclaimable memory peaks at 40 MiB instead of 73 MiB (-45 %), and it took 1 s instead of \
                    2 s (-50 %); what differs: budget, runs.</h1>";
    for text in [sentence, "a&lt;b&gt;.json", "<td>64 MiB</td><td>32 MiB</td>", "<td class=\"n\">-45 %</td>"]
    {
        assert!(html.contains(text), "{text}: {html}");
    }
    assert!(svg.contains("unreclaimable memory (MiB)") && svg.contains("class=\"peak-before\""), "{svg}");
    // Others say nothing about each other.
    let mut compared = report(vec![before.clone()]);
    compared.command = CommandName::Compare;
    let refused = changed(compared, report(vec![before])).unwrap_err().message;
    assert_eq!(refused, "a<b>.json is a report of `compare`, and b.json one of `run`");
    let doctor = || Report::new(CommandName::Doctor);
    assert!(changed(doctor(), doctor()).unwrap_err().message.contains("`doctor` are not compared"));
    assert!(changed(report(vec![]), report(vec![])).unwrap_err().message.contains("has no run"));
}
