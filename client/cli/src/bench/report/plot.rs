//! One picture of a run: wall times of every path and case, and how far the ring lies above the same copy in process.
//!
//! A box reaches from the first to the third quartile, its line is the median, its whiskers are the 5th and the 95th
//! percentile.

use std::fs;
use std::ops::Range;
use std::path::Path as FilePath;

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::super::plan::{Kind, Mode, Path};
use super::super::record::Record;
use super::super::statistics::{paired_ratios, percentile};
use crate::failure::Failure;

/// Paths in the picture, each with its colour.
const SHOWN: [(Path, RGBColor); 5] = [
    (Path::Inproc, RGBColor(0x33, 0x33, 0x33)),
    (Path::Ring, RGBColor(0x00, 0x72, 0xb2)),
    (Path::Control, RGBColor(0x8c, 0xc6, 0xe7)),
    (Path::Grpc, RGBColor(0xd5, 0x5e, 0x00)),
    (Path::Triton, RGBColor(0xcc, 0x79, 0xa7)),
];
const REFERENCES: [(Path, RGBColor); 3] = [
    (Path::PingpongSpin, RGBColor(0x00, 0x9e, 0x73)),
    (Path::PingpongFutex, RGBColor(0x00, 0x9e, 0x73)),
    (Path::Memcpy, RGBColor(0x00, 0x9e, 0x73)),
];

/// What to do where the picture cannot be written.
const PICTURE_REMEDY: &str = "The picture goes beside the record: report a copy of it in a directory that this user may write.";

const WIDTH: u32 = 1560;
const HEADER: u32 = 84;
const PANEL: u32 = 330;
const RATIOS: u32 = 460;
const COLUMNS: usize = 3;
const TEXT: RGBColor = RGBColor(0x22, 0x22, 0x22);
const RING: RGBColor = SHOWN[1].1;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The numbers of one box.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    low: f64,
    quartiles: [f64; 3],
    high: f64,
}

impl Spread {
    fn of(samples: &[f64]) -> Self {
        let at = |percent| percentile(samples, percent);
        Self { low: at(5.0), quartiles: [25.0, 50.0, 75.0].map(at), high: at(95.0) }
    }
}

/// One set of axes: cases side by side, in each of them a box a path.
#[derive(Debug)]
struct Panel {
    title: String,
    /// What stands below each place of the horizontal axis, and the case.
    places: Vec<(String, String)>,
}

/// Draws the picture.
///
/// # Errors
/// When the file cannot be written.
pub(super) fn draw(record: &Record, into: &FilePath) -> anyhow::Result<()> {
    let panels = panels(record);
    let rows = u32::try_from(panels.len().div_ceil(COLUMNS))?;
    let height = HEADER + rows * PANEL + RATIOS;
    let mut picture = String::new();
    let root = SVGBackend::with_string(&mut picture, (WIDTH, height)).into_drawing_area();
    let drawn = draw_all(record, &root, &panels, rows).and_then(|()| Ok(root.present()?));
    drawn.map_err(|error| anyhow!("Drawing {}: {error}", into.display()))?;
    drop(root);
    fs::write(into, picture).map_err(|error| {
        let sentence = format!("{} cannot be written: {error}", into.display());
        Failure::usage(sentence, PICTURE_REMEDY).into()
    })
}

/// Cases that differ in the selected rows alone share a panel; those of one kind share the last one.
fn panels(record: &Record) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Vec::new();
    let mut others = Panel { title: "other requests".to_owned(), places: Vec::new() };
    for case in &record.cases {
        let parts: Vec<&str> = case.name.split('/').collect();
        let [layout, selected, operation] = parts[..] else {
            others.places.push((case.name.clone(), case.name.clone()));
            continue;
        };
        let model = if layout == case.row_bytes.to_string() { "" } else { layout };
        let comma = if model.is_empty() { "" } else { ", " };
        let title = format!("{operation}{comma}{model}, rows of {} bytes", case.row_bytes);
        let place = (selected.replacen('s', "S=", 1), case.name.clone());
        match panels.iter_mut().find(|panel| panel.title == title) {
            Some(panel) => panel.places.push(place),
            None => panels.push(Panel { title, places: vec![place] }),
        }
    }
    if !others.places.is_empty() {
        panels.push(others);
    }
    panels
}

type Drawn = Result<(), Box<dyn std::error::Error + Send + Sync>>;

fn draw_all(record: &Record, root: &Area<'_>, panels: &[Panel], rows: u32) -> Drawn {
    root.fill(&WHITE)?;
    let (header, rest) = root.split_vertically(HEADER);
    draw_header(record, &header)?;
    let (grid, ratios) = rest.split_vertically(rows * PANEL);
    let cells = grid.split_evenly((usize::try_from(rows)?, COLUMNS));
    for (panel, cell) in panels.iter().zip(&cells) {
        draw_panel(record, panel, cell)?;
    }
    draw_ratios(record, &ratios)
}

fn draw_header(record: &Record, area: &Area<'_>) -> Drawn {
    let threads = format!("{} thread(s) a side", record.settings.copy_threads);
    let copies = match &record.device {
        Some(device) if record.kind() == Kind::Cuda => device.name.clone(),
        _ => threads,
    };
    let title = format!(
        "Wall time of one copy: {} trials, seed {}, {copies}, {}, Linux {}, {} build",
        record.trials,
        record.seed,
        record.machine.cpu_model,
        record.machine.kernel,
        record.source.profile,
    );
    area.draw(&Text::new(title, (16, 12), ("sans-serif", 20).into_font().color(&TEXT)))?;
    let mut x = 16;
    let measured = |path: &Path| {
        let mut cases = record.cases.iter();
        cases.any(|case| record.samples(&case.name, Mode::Wall, *path).is_some())
    };
    let shown = SHOWN.into_iter().filter(|(path, _)| measured(path));
    let references = REFERENCES.into_iter().filter(|(path, _)| measured(path)).take(1);
    let references = references.map(|(_, colour)| ("reference (ping-pong, memcpy)", colour));
    for (label, colour) in shown.map(|(path, colour)| (path.label(), colour)).chain(references) {
        area.draw(&Rectangle::new([(x, 46), (x + 18, 60)], colour.filled()))?;
        let style = ("sans-serif", 16).into_font().color(&TEXT);
        area.draw(&Text::new(label, (x + 24, 45), style))?;
        x += 60 + 9 * i32::try_from(label.len())?;
    }
    let note = "box: quartiles and median; whiskers: 5th and 95th percentile; logarithmic scale";
    area.draw(&Text::new(note, (x + 20, 45), ("sans-serif", 16).into_font().color(&TEXT)))?;
    Ok(())
}

fn draw_panel(record: &Record, panel: &Panel, area: &Area<'_>) -> Drawn {
    let boxes = boxes(record, panel);
    let bounds = bounds(boxes.iter().map(|(_, _, spread)| *spread));
    let Some(bounds) = bounds else { return Ok(()) };
    let range = bounds.start / 1.3..bounds.end * 1.3;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .caption(&panel.title, ("sans-serif", 17).into_font().color(&TEXT))
        .x_label_area_size(28)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..panel.places.len() as f64, range.log_scale())?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
        .disable_x_axis()
        .y_desc("microseconds")
        .y_label_formatter(&|value| plain(*value))
        .label_style(("sans-serif", 14).into_font().color(&TEXT))
        .draw()?;
    for (at, colour, spread) in boxes {
        let [low, middle, high] = spread.quartiles;
        let half = 0.09;
        let line = |points: Vec<(f64, f64)>| PathElement::new(points, colour.stroke_width(1));
        chart.plotting_area().draw(&line(vec![(at, spread.low), (at, spread.high)]))?;
        let corners = [(at - half, low), (at + half, high)];
        chart.plotting_area().draw(&Rectangle::new(corners, colour.mix(0.45).filled()))?;
        chart.plotting_area().draw(&Rectangle::new(corners, colour.stroke_width(1)))?;
        let median = PathElement::new(
            vec![(at - half, middle), (at + half, middle)],
            colour.stroke_width(3),
        );
        chart.plotting_area().draw(&median)?;
    }
    let names = panel.places.iter().map(|(label, _)| label.as_str());
    let ends = chart.plotting_area().get_pixel_range();
    label_places(area, names, Lettering::Flat, &ends.0, ends.1.end)
}

/// The middle of each box, its colour, its numbers.
fn boxes(record: &Record, panel: &Panel) -> Vec<(f64, RGBColor, Spread)> {
    let mut boxes = Vec::new();
    for (place, (_, case)) in panel.places.iter().enumerate() {
        let present: Vec<(RGBColor, Spread)> = SHOWN
            .into_iter()
            .chain(REFERENCES)
            .filter_map(|(path, colour)| {
                let samples = record.samples(case, Mode::Wall, path)?;
                Some((colour, Spread::of(samples)))
            })
            .collect();
        let step = 0.8 / present.len().max(1) as f64;
        for (at, (colour, spread)) in present.into_iter().enumerate() {
            boxes.push((place as f64 + 0.1 + step * (at as f64 + 0.5), colour, spread));
        }
    }
    boxes
}

/// Ratios within each trial, on a linear scale: what a logarithmic one hides.
fn draw_ratios(record: &Record, area: &Area<'_>) -> Drawn {
    let ratios: Vec<(&str, Spread)> = record
        .cases
        .iter()
        .filter_map(|case| {
            let wall = |path| record.samples(&case.name, Mode::Wall, path);
            let ratios = paired_ratios(wall(Path::Ring)?, wall(Path::Inproc)?);
            // An empty request in process is next to nothing: there the ratio says nothing.
            (case.selected > 0).then(|| (case.name.as_str(), Spread::of(&ratios)))
        })
        .collect();
    if ratios.is_empty() {
        return Ok(());
    }
    let top = ratios.iter().map(|(_, spread)| spread.quartiles[2]).fold(1.5, f64::max).min(4.0);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .caption(
            format!(
                "ring / inproc within each trial (1 = the daemon costs nothing); linear scale, cut off at {:.1}",
                top * 1.05
            ),
            ("sans-serif", 17).into_font().color(&TEXT),
        )
        .x_label_area_size(170)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..ratios.len() as f64, 0.8..top * 1.05)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
        .disable_x_axis()
        .y_desc("ratio")
        .label_style(("sans-serif", 14).into_font().color(&TEXT))
        .draw()?;
    let plot = chart.plotting_area();
    let one = vec![(0.0, 1.0), (ratios.len() as f64, 1.0)];
    plot.draw(&PathElement::new(one, TEXT.stroke_width(1)))?;
    for (place, (_, spread)) in ratios.iter().enumerate() {
        let at = place as f64 + 0.5;
        let inside = |value: f64| value.clamp(0.8, top * 1.05);
        let [low, middle, high] = spread.quartiles.map(inside);
        let whisker = vec![(at, inside(spread.low)), (at, inside(spread.high))];
        plot.draw(&PathElement::new(whisker, RING.stroke_width(1)))?;
        let corners = [(at - 0.25, low), (at + 0.25, high)];
        plot.draw(&Rectangle::new(corners, RING.mix(0.45).filled()))?;
        let median = vec![(at - 0.25, middle), (at + 0.25, middle)];
        plot.draw(&PathElement::new(median, RING.stroke_width(3)))?;
    }
    let ends = plot.get_pixel_range();
    let names = ratios.iter().map(|(name, _)| *name);
    label_places(area, names, Lettering::Upright, &ends.0, ends.1.end)
}

/// How a name stands below its place.
#[derive(Debug, Clone, Copy)]
enum Lettering {
    /// Centred.
    Flat,
    /// Upright, for long names.
    Upright,
}

/// Names below the places of the horizontal axis.
fn label_places<'n>(
    area: &Area<'_>,
    names: impl ExactSizeIterator<Item = &'n str>,
    lettering: Lettering,
    pixels: &Range<i32>,
    bottom: i32,
) -> Drawn {
    let (left, top) = area.get_base_pixel();
    let count = i32::try_from(names.len())?;
    let font = |size: i32| ("sans-serif", size).into_font().color(&TEXT);
    let style = match lettering {
        Lettering::Flat => font(14),
        Lettering::Upright => font(12).transform(FontTransform::Rotate90),
    };
    for (place, name) in (0..).zip(names) {
        let (aside, below) = match lettering {
            Lettering::Flat => (-(i32::try_from(name.len())? * 7 / 2), 8),
            Lettering::Upright => (6, 6),
        };
        let middle = (pixels.end - pixels.start) * (2 * place + 1) / (2 * count);
        let at = (pixels.start + middle + aside - left, bottom + below - top);
        area.draw(&Text::new(name, at, style.clone()))?;
    }
    Ok(())
}

/// The least and the greatest of the whiskers.
fn bounds(spreads: impl Iterator<Item = Spread>) -> Option<Range<f64>> {
    spreads.fold(None, |so_far, spread| {
        let Range { start, end } = so_far.unwrap_or(spread.low..spread.high);
        Some(start.min(spread.low)..end.max(spread.high))
    })
}

/// A power of ten without an exponent.
fn plain(value: f64) -> String {
    if value < 1.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}
